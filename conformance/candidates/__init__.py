"""Many files with a kernel each, judged in processes of their own: `mha judge-all`."""
