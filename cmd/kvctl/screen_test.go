package main

import (
	"bytes"
	"testing"
)

// TestSeveritiesHaveColoursForPeopleWhoWantThem only.
func TestSeveritiesHaveColoursForPeopleWhoWantThem(t *testing.T) {
	rows := [][]string{{"health", "serving"}, {"", "warning since noon: disk-low: no warning in the text"}, {"degraded", "x"}, {"warnings", "5"}}
	plain := "health    serving\n          warning since noon: disk-low: no warning in the text\ndegraded  x\nwarnings  5\n"
	painted := "health    serving\n          \x1b[33mwarning\x1b[0m since noon: disk-low: no warning in the text\n\x1b[31mdegraded\x1b[0m  x\nwarnings  5\n"
	for _, c := range []struct {
		terminal      bool
		noColor, term string
		want          string
	}{
		{true, "", "xterm", painted},
		{true, "1", "xterm", plain},
		{true, "", "dumb", plain},
		{false, "", "xterm", plain},
	} {
		var out bytes.Buffer
		a := &app{out: &out, outTerminal: c.terminal, getenv: func(name string) string { return map[string]string{"NO_COLOR": c.noColor, "TERM": c.term}[name] }}
		if err := a.writeReport(rows); err != nil || out.String() != c.want {
			t.Errorf("%+v: %q, %v", c, out.String(), err)
		}
	}
}

// TestTablesShowTextsOfOthersOnOneLine: a label of a token is of any user, and an administrator lists it.
func TestTablesShowTextsOfOthersOnOneLine(t *testing.T) {
	var out bytes.Buffer
	if err := (&app{out: &out}).writeTable([][]string{{"LABEL", "USER"}, {"\x1b[2Jgone\nroot", "ann"}}); err != nil {
		t.Fatal(err)
	}
	if want := "LABEL             USER\n\\x1b[2Jgone root  ann\n"; out.String() != want {
		t.Errorf("got %q, want %q", out.String(), want)
	}
}
