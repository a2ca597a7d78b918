"""Our figures beside the raw stores', the bare app's and the peers', each measured in the same run."""
