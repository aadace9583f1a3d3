"""What stands beside the core: one folder a feature. Entry points of the package name what each brings."""
