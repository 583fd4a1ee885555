package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/audit"
)

// auditTailMax is how many lines of answered requests a kill may take with it: a line is written by a goroutine that has
// nothing else to do, and no answer waits for it.
const auditTailMax = 1000

// TestKilledServerLeavesAWholeAuditLog: after kill -9 the chain of the audit log holds, its lines are those of the first requests
// without a gap, and the next start says that the end was not clean.
func TestKilledServerLeavesAWholeAuditLog(t *testing.T) {
	binary, dir := mustBuild(t), t.TempDir()
	file := filepath.Join(dir, "audit.log")
	args := []string{"--audit-file", file, "--audit", "write", "--audit-full", "block", "--audit-keys", "whole", "--audit-chain"}
	acknowledged, before := 0, 0
	for round := range 3 {
		p := mustRun(t, binary, filepath.Join(dir, "data"), args...)
		conn := mustDial(t, p.address)
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		kill := time.AfterFunc(300*time.Millisecond, func() { _ = p.cmd.Process.Kill() })
		for {
			if _, err := pb.NewKVServiceClient(conn).Put(ctx, &pb.PutRequest{Key: fmt.Appendf(nil, "%d-%d", round, acknowledged-before), Durability: pb.Durability_DURABILITY_ASYNC}); err != nil {
				break
			}
			acknowledged++
		}
		kill.Stop()
		cancel()
		_ = conn.Close()
		if err := <-p.exited; err == nil {
			t.Fatalf("round %d: the server was not killed", round)
		}
		report, err := audit.Verify([]string{file})
		if err != nil || report.Unclean != round || report.Dropped {
			t.Fatalf("round %d: %+v, %v", round, report, err)
		}
		keys := auditedKeys(t, file, round)
		for i, key := range keys {
			if key != fmt.Sprintf("%d-%d", round, i) {
				t.Fatalf("line %d is of %s", i, key)
			}
		}
		lost := acknowledged - before - len(keys)
		t.Logf("round %d: %d requests were acknowledged, the lines of %d are missing", round, acknowledged-before, lost)
		if len(keys) == 0 || lost > auditTailMax {
			t.Errorf("of %d acknowledged requests %d have a line", acknowledged-before, len(keys))
		}
		before = acknowledged
	}
}

// auditedKeys are the keys that the lines of a round's puts name.
func auditedKeys(t *testing.T, file string, round int) (all []string) {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	begins := fmt.Sprintf("%d-", round)
	for s := bufio.NewScanner(f); s.Scan(); {
		var l struct{ Writes []string }
		if err := json.Unmarshal(s.Bytes(), &l); err != nil {
			continue // the part of a line that the kill left; Verify knows it
		}
		if len(l.Writes) == 1 && len(l.Writes[0]) > len(begins) && l.Writes[0][:len(begins)] == begins {
			all = append(all, l.Writes[0])
		}
	}
	return all
}
