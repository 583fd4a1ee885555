package main

import (
	"testing"

	"github.com/epochkv/epochkv/bench/harness"
)

func TestFiguresNameArmsAndPointsOfTheirScenario(t *testing.T) {
	if err := harness.Validate(everything()); err != nil {
		t.Error(err)
	}
}
