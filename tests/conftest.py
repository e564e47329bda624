"""Its being here puts this folder on `sys.path`: every tier can import `models`."""
