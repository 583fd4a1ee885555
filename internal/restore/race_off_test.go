//go:build !race

package restore

const exhaustiveStep = 1
