"""Fast counter sampling and microbursts: what happens below the polling interval."""
