//go:build !race

package backup

const exhaustiveStep = 1
