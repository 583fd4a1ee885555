//go:build !race

package sim

const exhaustiveStep = 1
