SERVER_ARGS: tuple[str, ...] = ()
