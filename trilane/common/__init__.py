"""The ground floor: errors, names, files and schemas. It imports nothing of Trilane; every floor may import it."""
