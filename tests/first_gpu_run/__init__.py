"""What a GPU is asked for first: `make first-gpu-run OUT=FOLDER`, in calls of ten minutes, each of which goes on."""
