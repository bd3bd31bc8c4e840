"""The page in the browser, and the report in one file: answers of the verbs as records that a script draws."""
