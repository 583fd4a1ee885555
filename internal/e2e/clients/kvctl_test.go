package clients

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The scripts of cmd/kvctl show every output; this test checks exit codes against the real server.
func TestKvctlExitCodes(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	large := strings.Repeat("k", 2049)
	for _, test := range []struct {
		args string
		code int
	}{
		{"health", 0},
		{"put k v", 0},
		{"get k", 0},
		{"get missing", 3},
		{"put --if-absent k v", 4},
		{"get " + large, 7},
		{"put " + large + " v", 7},
		{"get k --at 1000000", 1},
		{"get", 2},
		{"status -o json", 0},
		{"scan --count", 0},
		{"get k --endpoint 127.0.0.1:1 --timeout 100ms", 6},
	} {
		stdout, stderr, code := s.kvctl("", strings.Fields(test.args)...)
		if code != test.code {
			t.Errorf("kvctl %.60s: exit %d, want %d\n%s%s", test.args, code, test.code, stdout, stderr)
		}
	}
}

func TestExportOfAnImportIsTheImport(t *testing.T) {
	t.Parallel()
	const seed = 7
	random := rand.New(rand.NewPCG(seed, seed))
	s := startServer(t)
	var lines bytes.Buffer
	for i := range 3000 {
		value := make([]byte, random.IntN(200))
		for j := range value {
			value[j] = byte(random.UintN(256)) // mostly not UTF-8
		}
		fmt.Fprintf(&lines, "{\"key\":\"k%06d\",\"value_hex\":\"%x\"}\n", i, value)
	}
	if _, stderr, code := s.kvctl(lines.String(), "import", "-"); code != 0 {
		t.Fatal(stderr)
	}
	first, stderr, code := s.kvctl("", "export")
	if code != 0 || strings.Count(first, "\n") != 3000 {
		t.Fatalf("exit %d, %d lines: %s", code, strings.Count(first, "\n"), stderr)
	}
	file := filepath.Join(s.dir, "export.csv")
	if _, stderr, code := s.kvctl("", "export", "--format", "csv", "--base64", "--file", file); code != 0 {
		t.Fatal(stderr)
	}
	if _, stderr, code := s.kvctl("", "del", "--prefix", "k"); code != 0 {
		t.Fatal(stderr)
	}
	if _, stderr, code := s.kvctl("", "import", file); code != 0 {
		t.Fatal(stderr)
	}
	s.signal(syscall.SIGKILL)
	s.start()
	if again, _, _ := s.kvctl("", "export"); again != first {
		t.Errorf("seed %d: the export of the import of the export differs", seed)
	}
}

// The server dies twice during an import, which continues as if nothing had happened: of the
// records with one key, the last one wins, although batches were repeated.
func TestAnImportSurvivesRestarts(t *testing.T) {
	t.Parallel()
	const records, keys = 150_000, 20_000
	s := startServer(t)
	var lines bytes.Buffer
	for i := range records {
		fmt.Fprintf(&lines, "{\"key\":\"k%05d\",\"value\":\"%d\"}\n", i*7919%keys, i)
	}
	file := filepath.Join(s.dir, "records.jsonl")
	if err := os.WriteFile(file, lines.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	imported := make(chan string, 1)
	go func() {
		_, stderr, code := s.kvctl("", "import", "--batch", "100", file)
		imported <- fmt.Sprintf("exit %d: %s", code, stderr)
	}()
	for range 2 {
		time.Sleep(150 * time.Millisecond)
		s.signal(syscall.SIGKILL)
		s.start()
	}
	if result := <-imported; !strings.HasPrefix(result, fmt.Sprintf("exit 0: imported %d records", records)) {
		t.Fatal(result)
	}
	found, _, _ := s.kvctl("", "scan", "-o", "raw")
	if n := strings.Count(found, "\n"); n != keys {
		t.Fatalf("%d keys, want %d", n, keys)
	}
	last := map[string]string{}
	for i := range records {
		last[fmt.Sprintf("k%05d", i*7919%keys)] = fmt.Sprint(i)
	}
	for line := range strings.Lines(found) {
		key, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "\t")
		if last[key] != value {
			t.Fatalf("%s is %s, want %s", key, value, last[key])
		}
	}
}

// The tour of the README, on a generated index.
func TestTour(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("runs the go command")
	}
	var index bytes.Buffer
	for i := range 2000 {
		fmt.Fprintf(&index, "Package: p%d\nVersion: 1.%d\nDescription: <é> & \"quotes\"\n more\n\n", i%700, i%900)
	}
	file := filepath.Join(t.TempDir(), "index")
	if err := os.WriteFile(file, index.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	tour := exec.Command("../../../examples/packages/tour.sh", file)
	tour.Env = append(os.Environ(), "BIN="+bin)
	out, err := tour.CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("equal: ")) {
		t.Errorf("%v:\n%s", err, out)
	}
}
