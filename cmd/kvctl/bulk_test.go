package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client/clienttest"
	"github.com/epochkv/epochkv/internal/testseed"
)

func TestImportUsesABulkLoadWhereItPays(t *testing.T) {
	const free = 10 * bulkBytesMin
	for _, c := range []struct {
		name                  string
		total                 int64
		live, memtables, free uint64
		want                  bool
	}{
		{"a large file into an empty store", bulkBytesMin, 0, 0, free, true},
		{"a small file", bulkBytesMin - 1, 0, 0, free, false},
		{"standard input", -1, 0, 0, free, false},
		{"a store with as much in its data file", bulkBytesMin, bulkBytesMin, 0, free, false},
		{"a store with as much in memory", bulkBytesMin, bulkBytesMin / 2, bulkBytesMin / 2, free, false},
		{"a file that is larger than the store", 2 * bulkBytesMin, bulkBytesMin, 0, free, true},
		{"a disk that is nearly full", bulkBytesMin, 0, 0, bulkDiskFactor * bulkBytesMin, false},
	} {
		status := &kvpb.StatusResponse{
			Tree: &kvpb.Tree{LiveBytes: c.live}, Sizes: &kvpb.Sizes{MemtableBytes: c.memtables, DiskFreeBytes: c.free},
		}
		if got := bulkPays(c.total, status); got != c.want {
			t.Errorf("%s: in bulk %v", c.name, got)
		}
	}
}

func TestImportSaysInWhichWayItWent(t *testing.T) {
	testseed.SkipUnderRace(t) // it reads 64 MiB eight times; other tests import beside other work
	name := filepath.Join(t.TempDir(), "large.jsonl")
	record := []byte(`{"key":"k","value":"v"}` + "\n")
	blank := append(bytes.Repeat([]byte(" "), 60<<10), '\n') // empty lines are skipped
	if err := os.WriteFile(name, append(bytes.Repeat(blank, bulkBytesMin/len(blank)+1), record...), 0o600); err != nil {
		t.Fatal(err)
	}
	busy := clienttest.NewRetryError(codes.ResourceExhausted, kvpb.ErrorReason_ERROR_REASON_BULK_LOAD_BUSY, "another load", time.Millisecond)
	damaged := clienttest.NewError(codes.DataLoss, kvpb.ErrorReason_ERROR_REASON_CORRUPTION, "the page is damaged")
	for _, c := range []struct {
		name           string
		flags          []string
		fault          error // of the load
		loads, batches int
		code           int
		says           []string
	}{
		{"by itself", nil, nil, 1, 0, 0, []string{"loading in bulk", "loaded 1 records"}},
		{"without a choice", []string{"--bulk=never"}, nil, 0, 1, 0, []string{"imported 1 records"}},
		{"with the flags of batches", []string{"--durability=async"}, nil, 0, 1, 0, []string{"imported 1 records"}},
		{"beside another load", nil, busy, 1, 1, 0, []string{"the load was given up", "imported 1 records"}},
		{"beside another load, without a choice", []string{"--bulk"}, busy, 1, 0, exitLimit, []string{"another load"}},
		{"after a failure", nil, damaged, 1, 0, exitCorruption, []string{"the page is damaged"}},
		{"with an answer that was lost", nil, status.Error(codes.Unavailable, "connection reset"), 1, 0, exitUnavailable, []string{"all records may be loaded"}},
		{"with flags that exclude each other", []string{"--bulk", "--batch=7"}, nil, 0, 0, exitUsage, []string{"--bulk=never"}},
		{"with an unknown word", []string{"--bulk=sometimes"}, nil, 0, 0, exitUsage, []string{"auto, always or never"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			server := clienttest.Start(t)
			server.SetDiskFree(1 << 40)
			if c.fault != nil {
				server.FailNext(nil, c.fault) // after the status
			}
			var errs, out bytes.Buffer
			a := &app{in: strings.NewReader(""), out: &out, err: &errs, getenv: func(string) string { return "" }}
			code := a.run(t.Context(), append([]string{"import", name, "--endpoint", server.Endpoint}, c.flags...))
			if loads, batches := server.Calls("BulkLoad"), server.Calls("Pipeline"); code != c.code || loads != c.loads || batches != c.batches {
				t.Errorf("exit %d, %d loads, %d pipelines: %s", code, loads, batches, &errs)
			}
			for _, s := range c.says {
				if !strings.Contains(errs.String(), s) {
					t.Errorf("%q is not in %q", s, &errs)
				}
			}
		})
	}
}
