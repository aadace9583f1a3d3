"""Where the bounds and floors come from: sound engines and planted faults, measured. Each file is a command."""
