//go:build !race

package wal

import "golang.org/x/sys/unix"

func reserveBuffer(size int) ([]byte, error) { return mapBuffer(size) }

func releaseBuffer(buf []byte) error { return unix.Munmap(buf) }
