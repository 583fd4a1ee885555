package restore

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/epochkv/epochkv/internal/objectstore"
)

// TestDrillRemovesWhatKilledOnesHaveLeft: the copy of a store that a killed drill leaves is removed by the next one. The directory of a
// drill that runs stays, and so does everything that no drill has made, whatever its name is.
func TestDrillRemovesWhatKilledOnesHaveLeft(t *testing.T) {
	b, parent := newBench(t), t.TempDir()
	b.commits(20)
	b.archived()
	killDrill(t, b, parent)
	left := names(t, parent)
	if len(left) != 1 {
		t.Fatalf("the killed drill has left %v", left)
	}
	if copied, err := os.ReadDir(filepath.Join(parent, left[0], "store"+partialSuffix)); err != nil || len(copied) == 0 {
		t.Fatalf("the killed drill has left no copy: %v, %v", copied, err)
	}
	for _, dir := range []string{"epochkv-drill-mine", "other"} {
		check(t, os.MkdirAll(filepath.Join(parent, dir, "store"), 0o700))
	}
	check(t, os.WriteFile(filepath.Join(parent, "other", markerName), []byte(markerText), 0o600)) // with another name
	check(t, os.Mkdir(filepath.Join(parent, "epochkv-drill-notes"), 0o700))
	check(t, os.WriteFile(filepath.Join(parent, "epochkv-drill-notes", markerName), []byte("notes\n"), 0o600))
	check(t, os.Symlink(filepath.Join(parent, "other"), filepath.Join(parent, "epochkv-drill-link")))
	check(t, os.WriteFile(filepath.Join(parent, "epochkv-drill-file"), nil, 0o600))
	foreign := slices.DeleteFunc(names(t, parent), func(n string) bool { return n == left[0] })
	running, err := newScratch(parent)
	check(t, err)
	_, err = Drill(t.Context(), Options{Store: b.target, Dir: parent, PageSize: 1024, Memory: 64 << 20, Lineage: b.lineage()})
	check(t, err)
	if _, err := os.Stat(running.dir); err != nil {
		t.Fatalf("the directory of a drill that runs: %v", err)
	}
	check(t, running.remove())
	if got := names(t, parent); !slices.Equal(got, foreign) {
		t.Fatalf("after the drill %v, want %v", got, foreign)
	}
}

func names(t *testing.T, dir string) (list []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	check(t, err)
	for _, e := range entries {
		list = append(list, e.Name())
	}
	return list
}

const (
	drillTarget = "EPOCHKV_TEST_DRILL_TARGET"
	drillParent = "EPOCHKV_TEST_DRILL_PARENT"
)

// killDrill begins a drill in another process, and kills it when it has the copy of the store.
func killDrill(t *testing.T, b *bench, parent string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestDrillThatIsKilled$")
	cmd.Env = append(os.Environ(), drillTarget+"="+b.target.String(), drillParent+"="+parent)
	out, err := cmd.StdoutPipe()
	check(t, err)
	check(t, cmd.Start())
	if _, err := out.Read(make([]byte, 1)); err != nil { // it has come to the verification
		t.Fatal(err)
	}
	check(t, cmd.Process.Kill())
	_ = cmd.Wait() // it was killed
}

// TestDrillThatIsKilled is the process that killDrill begins.
func TestDrillThatIsKilled(t *testing.T) {
	if os.Getenv(drillTarget) == "" {
		t.Skip("another test begins it")
	}
	target, err := objectstore.Open(os.Getenv(drillTarget), objectstore.Options{})
	check(t, err)
	_, err = Drill(t.Context(), Options{Store: target, Dir: os.Getenv(drillParent), PageSize: 1024, Memory: 64 << 20, Progress: func(p Progress) {
		if p.Step == "clean and verify" {
			_, _ = os.Stdout.WriteString("x")
			select {}
		}
	}})
	t.Fatal("the drill was not killed", err)
}
