// Command etcdserver is the etcd server, built from its own module by the versions that its go.mod pins. It has a module of
// its own, so that none of etcd's dependencies reaches the benchmarks' go.mod.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
