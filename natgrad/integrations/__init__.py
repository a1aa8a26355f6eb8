"""Other people's loops: ``ng.log_to`` for their loggers, and adapters where a framework's contract needs one."""
