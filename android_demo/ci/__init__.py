"""The scripted build of the Android parts from registry packages: `python -m android_demo.ci`."""
