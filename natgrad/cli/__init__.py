"""The `natgrad` command. Plots and progress bars need `pip install 'natgrad[cli]'`; the library itself does not."""
