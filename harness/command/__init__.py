"""What every command of the command line is made of: options, forms of results, progress, interrupts."""
