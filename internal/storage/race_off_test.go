//go:build !race

package storage

const exhaustiveStep = 1
