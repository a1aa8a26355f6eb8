"""The `natgrad` command. It needs `pip install 'natgrad[cli]'`; the library does not."""
