"""Numbers as people read them."""

UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def amount(count: float) -> str:
    """Bytes in three digits: ``1.23 GB``; 1 GB is 1e9 bytes."""
    unit = 0
    while count >= 999.5 and unit < len(UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.3g} {UNITS[unit]}"


def duration(seconds: float) -> str:
    """Seconds, or milliseconds below one."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
