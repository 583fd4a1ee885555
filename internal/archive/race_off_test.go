//go:build !race

package archive

const exhaustiveStep = 1
