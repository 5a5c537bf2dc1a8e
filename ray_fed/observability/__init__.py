"""What happened, as events, reports and pictures; nothing reads them to decide."""
