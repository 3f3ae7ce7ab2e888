"""The subcommands of ``fp8``, one module each; what they do lives elsewhere in the package."""
