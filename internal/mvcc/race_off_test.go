//go:build !race

package mvcc

const exhaustiveStep = 1
