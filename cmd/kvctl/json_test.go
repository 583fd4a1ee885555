package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/wal"
)

// isJSON reports whether a text is documents of JSON, one after the other, and nothing else.
func isJSON(text string) bool {
	d := json.NewDecoder(strings.NewReader(text))
	for n := 0; ; n++ {
		var document any
		if err := d.Decode(&document); err != nil {
			return errors.Is(err, io.EOF) && n > 0
		}
	}
}

// TestJSONIsAllThatIsPrinted, as the help says of -o json: also where there is nothing to show, and of what is in several parts.
func TestJSONIsAllThatIsPrinted(t *testing.T) {
	s := startServer(t)
	run := func(ctx context.Context, args ...string) (out, errs string, code int) {
		var stdout, stderr bytes.Buffer
		a := &app{in: strings.NewReader(""), out: &stdout, err: &stderr, getenv: func(string) string { return "" }}
		code = a.run(ctx, append(args, "--endpoint", s.Address()))
		return stdout.String(), stderr.String(), code
	}
	lease, errs, code := run(t.Context(), "lease", "grant", "60s")
	if lease = strings.TrimSpace(lease); code != exitOK {
		t.Fatal(errs)
	}
	if _, errs, code := run(t.Context(), "put", "key", "value", "--lease", lease); code != exitOK {
		t.Fatal(errs)
	}
	for _, command := range []string{"archive status", "lease show " + lease, "lease list", "holds list"} {
		for _, format := range []string{formatJSON, formatJSONL} {
			out, errs, code := run(t.Context(), append(strings.Fields(command), "-o", format)...)
			if code != exitOK || out != "" && !isJSON(out) || format == formatJSON && out == "" {
				t.Errorf("%s -o %s: exit code %d, %s%s", command, format, code, out, errs)
			}
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if out, _, _ := run(ctx, "elect", "election", "--observe", "-o", formatJSONL); !isJSON(out) || !strings.Contains(out, `"token"`) {
		t.Errorf("elect --observe: %s", out)
	}
	var out, failed bytes.Buffer
	a := &app{out: &out, err: &failed, format: formatJSON}
	if code := a.report(&archive.MissingError{From: 7}); code != exitCorruption || !isJSON(failed.String()) {
		t.Errorf("a state that is not in the archive: exit code %d, %s", code, &failed)
	}
	for _, dropped := range []inspect.RepairedLog{{}, {Cause: &wal.CorruptionError{File: "f", Offset: 1}, From: 7, Files: []string{"g"}}} {
		if out.Reset(); a.printRepaired(dropped) != nil || !isJSON(out.String()) {
			t.Errorf("repair-log: %s", &out)
		}
	}
	a.format = formatTable
	for from, says := range map[keys.Epoch]bool{7: false, 8: true} {
		out.Reset()
		check := a.printRepaired(inspect.RepairedLog{Cause: &wal.CorruptionError{File: "f", Offset: 1, Epoch: 7}, From: from})
		if check != nil || strings.Contains(out.String(), "the data file has the commits of epochs 7 to 7:") != says {
			t.Errorf("repair-log: %v, %s", check, &out)
		}
	}
	a.format = formatJSON
	if out.Reset(); a.printPruned(&kvpb.PruneBackupsResponse{}, false) != nil || !strings.Contains(out.String(), `"removed": []`) {
		t.Errorf("prune: %s", &out)
	}
}
