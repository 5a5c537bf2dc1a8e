"""Ray as the driver uses it: sessions, runners, leases that are kept."""
