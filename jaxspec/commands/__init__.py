"""The commands of the command line, one module each, and what they share."""

EXIT_DIFFERENT = 1
EXIT_ERROR = 2
