"""The command line's verbs; what a verb needs is imported when it runs."""
