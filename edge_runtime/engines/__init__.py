"""Engines that run the device half. All drafting state is the caller's; an engine is one pure function."""
