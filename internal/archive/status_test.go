package archive

import (
	"errors"
	"testing"
)

// TestARefusalStaysUntilTheArchiveTakesTheLog: an error that passes says nothing about whether the archive fits the store.
func TestARefusalStaysUntilTheArchiveTakesTheLog(t *testing.T) {
	passing := errors.New("the target does not answer")
	for name, taken := range map[string]func(*Archiver){
		"a step":    (*Archiver).progress,
		"an upload": func(a *Archiver) { a.uploaded(new(sealed)) },
	} {
		a := new(Archiver)
		a.failed(&RefusedError{"another history"})
		a.failed(passing)
		if s := a.Status(); !s.Refused() || s.Refusal == nil || !errors.Is(s.Err, passing) {
			t.Errorf("before %s: %+v", name, s)
		}
		taken(a)
		a.failed(passing)
		if s := a.Status(); s.Refused() || s.Refusal != nil {
			t.Errorf("after %s: %+v", name, s)
		}
	}
}
