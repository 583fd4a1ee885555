//go:build !race

package btree

const exhaustiveStep = 1
