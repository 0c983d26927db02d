"""The ``blockdraft`` command, one file per subcommand."""
