"""The command line's verbs, one file each; what a verb needs is imported when it runs."""
