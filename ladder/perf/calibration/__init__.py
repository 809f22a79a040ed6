"""`ladder bench machine`: the measurements that describe a machine."""
