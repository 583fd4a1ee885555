package main

import (
	"bytes"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// wellStatus is the status of a server without problems.
func wellStatus() *kvpb.StatusResponse {
	return &kvpb.StatusResponse{
		Health: &kvpb.Health{State: kvpb.Health_STATE_SERVING}, Uptime: durationpb.New(time.Hour),
		Sizes:    &kvpb.Sizes{DiskFreeBytes: 1 << 40, DataFileBytes: 1 << 30, MemoryBudgetBytes: 1 << 30, ResidentBytes: 1 << 30},
		Sessions: &kvpb.Sessions{Open: 3}, Limits: &kvpb.Limits{Connections: 1024}, Tree: &kvpb.Tree{}, Recovery: &kvpb.Recovery{},
		History: &kvpb.History{FeatureLevel: 2, FeatureLevelNewest: 2},
	}
}

// TestDoctorFindsEachKnownProblem and nothing else in the same status.
func TestDoctorFindsEachKnownProblem(t *testing.T) {
	if found := diagnose(wellStatus()); len(found) > 0 {
		t.Errorf("a server that is well: %v", found)
	}
	for want, spoil := range map[string]func(*kvpb.StatusResponse){
		"warning: disk-low": func(s *kvpb.StatusResponse) {
			s.Health.Conditions = []*kvpb.Condition{{Name: "disk-low", Severity: kvpb.Condition_SEVERITY_WARNING}}
		},
		"unavailable: the server does not serve: shutting down": func(s *kvpb.StatusResponse) { s.Health.State = kvpb.Health_STATE_DRAINING },
		"note: 1.0 MiB of disk are free":                        func(s *kvpb.StatusResponse) { s.Sizes.DiskFreeBytes = 1 << 20 },
		"warning: the process takes 2.0 GiB":                    func(s *kvpb.StatusResponse) { s.Sizes.ResidentBytes = 2 << 30 },
		"note: a snapshot is 11m0s old":                         func(s *kvpb.StatusResponse) { s.Sessions.OldestSnapshotAge = durationpb.New(11 * time.Minute) },
		"warning: 2 reads met a damaged page":                   func(s *kvpb.StatusResponse) { s.Tree.DamagedReads = 2 },
		"warning: the start repaired 1 places":                  func(s *kvpb.StatusResponse) { s.Recovery.Repaired = []string{"superblock"} },
		"note: writers are slowed down":                         func(s *kvpb.StatusResponse) { s.Tree.ThrottleDelayPerKib = durationpb.New(time.Millisecond) },
		"warning: 1000 sessions of 1024 connections":            func(s *kvpb.StatusResponse) { s.Sessions.Open = 1000 },
		"note: the store is at feature level 1 of 2":            func(s *kvpb.StatusResponse) { s.History.FeatureLevel = 1 },
		"note: the server started less than a minute ago":       func(s *kvpb.StatusResponse) { s.Uptime = durationpb.New(5 * time.Second) },
		"note: feed change log keeps 95 B of log": func(s *kvpb.StatusResponse) {
			s.LogHolders = []*kvpb.LogHolder{{Name: "feed", Owner: "change log", Bytes: 95, BytesMax: 100}}
		},
	} {
		s := wellStatus()
		spoil(s)
		found := diagnose(s)
		severity, text, _ := strings.Cut(want, ": ")
		if len(found) != 1 || found[0].Severity != severity || !strings.Contains(found[0].Problem, text) || found[0].Remedy == "" {
			t.Errorf("%s: found %q", want, found)
		}
	}
}

// TestEveryConditionOfTheRunbookHasARemedy, so that doctor knows what operators can read.
func TestEveryConditionOfTheRunbookHasARemedy(t *testing.T) {
	text, err := os.ReadFile("../../docs/runbook.md")
	if err != nil {
		t.Fatal(err)
	}
	sections := regexp.MustCompile(`(?m)^### ([a-z-]+)$`).FindAllStringSubmatch(string(text), -1)
	if len(sections) < 15 {
		t.Fatalf("%d sections", len(sections))
	}
	for _, s := range sections {
		if remedies[s[1]] == "" {
			t.Errorf("doctor has no remedy for %s", s[1])
		}
	}
}

// TestDoctorEndsByWhatItFound: scripts decide by the exit code.
func TestDoctorEndsByWhatItFound(t *testing.T) {
	stopped := wellStatus()
	stopped.Health.State = kvpb.Health_STATE_READ_ONLY
	for name, row := range map[string]struct {
		status   *kvpb.StatusResponse
		endpoint string
		found    []problem
		code     int
		text     string
	}{
		"nothing": {wellStatus(), "localhost:7400", nil, exitOK, "ok  no known problem\n"},
		"a note":  {wellStatus(), "[::1]:7400", []problem{{severityNote, "a", "b"}}, exitOK, "note  a\n      -> b\n"},
		"warning": {wellStatus(), "127.0.0.1:7400", []problem{{"warning", "a", "b"}}, exitError, "warning  a\n         -> b\n"},
		"stopped": {stopped, "localhost:7400", []problem{{"unavailable", "a", "b"}}, exitUnavailable, "unavailable  a\n             -> b\n"},
	} {
		var out, errs bytes.Buffer
		a := &app{out: &out, err: &errs, endpoint: row.endpoint}
		if code := a.report(a.tellProblems(row.status, append(row.found, a.diagnoseConnection()...))); code != row.code || out.String() != row.text || errs.Len() > 0 {
			t.Errorf("%s: exit %d\n%s%s", name, code, out.String(), errs.String())
		}
	}
	a := &app{endpoint: "db1:7400", tls: tlsSettings{PlainText: true}}
	if found := a.diagnoseConnection(); len(found) != 1 {
		t.Errorf("plain text off loopback: %v", found)
	}
}
