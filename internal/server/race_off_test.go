//go:build !race

package server

const exhaustiveStep = 1
