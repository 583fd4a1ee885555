package server

import "testing"

// TestKeptAnswersAreUsedAgain: an answer of a pipeline that waits takes the memory of one that was
// delivered.
func TestKeptAnswersAreUsedAgain(t *testing.T) {
	var p directPipeline
	p.server = new(Server)
	a := answer{id: 1}
	allocated := testing.AllocsPerRun(100, func() {
		keptAnswers.Put(p.keep(&a)) // as deliver does
	})
	if allocated != 0 {
		t.Errorf("keeping an answer allocates %v times", allocated)
	}
}
