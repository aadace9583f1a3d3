"""Many checks as one long run: suites, searches, servers, quantised forms."""
