"""Ways to get a mixture of experts wrong: the router, its choice, the experts, the shared one."""
