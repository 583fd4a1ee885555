package health

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"
)

func newTestList() (*List, *bytes.Buffer) {
	out := new(bytes.Buffer)
	return NewList(slog.New(slog.NewTextHandler(out, nil))), out
}

func TestConditionIsLoggedWhenItBeginsRepeatedlyAndWhenItEnds(t *testing.T) {
	l, out := newTestList()
	at := time.Unix(1000, 0)
	rain := []Condition{{Name: "rain", Severity: Warning, Message: "it rains", Cause: "3 inches"}}
	lines := func() int { return strings.Count(out.String(), "it rains") }
	for range 100 { // a hundred seconds
		l.Update(at, rain)
		at = at.Add(time.Second)
	}
	if lines() != 1 || !strings.Contains(out.String(), "level=WARN") || !strings.Contains(out.String(), `cause="3 inches"`) {
		t.Fatalf("after its beginning: %s", out)
	}
	for range int(repeatEvery / time.Second) {
		l.Update(at, rain)
		at = at.Add(time.Second)
	}
	if lines() != 2 {
		t.Fatalf("after it went on for %v: %s", repeatEvery, out)
	}
	l.Update(at, nil)
	l.Update(at.Add(time.Second), nil)
	if lines() != 3 || !strings.Contains(out.String(), "ended: it rains") || !strings.Contains(out.String(), "lasted=11m40s") {
		t.Fatalf("after its end: %s", out)
	}
}

func TestConditionKeepsItsBeginningWhileItsCauseChanges(t *testing.T) {
	l, out := newTestList()
	at := time.Unix(1000, 0)
	l.Update(at, []Condition{{Name: "disk", Severity: Warning, Message: "the disk is nearly full", Cause: "2 left"}})
	l.Update(at.Add(time.Minute), []Condition{{Name: "disk", Severity: Unavailable, Message: "the disk is full", Cause: "0 left"}})
	got := l.Snapshot()
	if len(got) != 1 || !got[0].Since.Equal(at) || got[0].Cause != "0 left" || got[0].Severity != Unavailable {
		t.Fatalf("%+v", got)
	}
	if !strings.Contains(out.String(), "level=ERROR") {
		t.Errorf("becoming worse is not logged: %s", out)
	}
}

func TestSnapshotBeginsWithTheWorst(t *testing.T) {
	l, _ := newTestList()
	l.Update(time.Unix(1, 0), []Condition{
		{Name: "b", Severity: Warning}, {Name: "c", Severity: Unavailable}, {Name: "a", Severity: Warning}, {Name: "d", Severity: Degraded},
	})
	var names strings.Builder
	for _, c := range l.Snapshot() {
		names.WriteString(c.Name)
	}
	if names.String() != "cdab" {
		t.Errorf("order %q", names.String())
	}
}

func TestOlderObservationChangesNothing(t *testing.T) {
	l, _ := newTestList()
	l.Update(time.Unix(10, 0), []Condition{{Name: "new", Severity: Warning}})
	l.Update(time.Unix(9, 0), nil)
	if len(l.Snapshot()) != 1 {
		t.Error("an observation of the past ended a condition")
	}
}
