//go:build !race

package wal

import "golang.org/x/sys/unix"

func reserveImage(size int) ([]byte, error) { return mapImage(size) }

func releaseImage(buf []byte) error { return unix.Munmap(buf) }
