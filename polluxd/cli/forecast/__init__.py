"""`polluxctl forecast`, and what other commands tell of forecasts."""
