"""The mechanism that simulator and executor share: session, residency, copy queue."""
