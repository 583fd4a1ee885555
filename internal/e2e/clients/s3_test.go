package clients

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

const bucketURL = "s3://" + gatewayBucket

// archiveState is what kvctl says of an archive.
type archiveState struct {
	ArchivedEpoch client.Epoch `json:"archived_epoch"`
	Error         string       `json:"error"`
	Restorable    []struct {
		FirstEpoch client.Epoch `json:"first_epoch"`
		LastEpoch  client.Epoch `json:"last_epoch"`
	} `json:"restorable"`
}

func (s *server) archiveState() (a archiveState) {
	s.t.Helper()
	s.mustJSON(&a, "archive", "status", "-o", "json")
	return a
}

func (s *server) mustJSON(into any, args ...string) {
	s.t.Helper()
	out := s.mustKvctl(args...)
	if err := json.Unmarshal([]byte(out), into); err != nil {
		s.t.Fatalf("kvctl %s: %v in\n%s", args, err, out)
	}
}

// awaitArchived waits until an epoch is in the archive, which has no hole before it.
func (s *server) awaitArchived(e client.Epoch) {
	s.t.Helper()
	var a archiveState
	for deadline := time.Now().Add(2 * time.Minute); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		if a = s.archiveState(); a.ArchivedEpoch >= e && a.Error == "" {
			if len(a.Restorable) != 1 || a.Restorable[0].FirstEpoch != 1 || a.Restorable[0].LastEpoch < e {
				s.t.Fatalf("the archive has a hole: %+v", a)
			}
			return
		}
	}
	s.t.Fatalf("epoch %d is not archived: %+v", e, a)
}

// backupLine is a backup as kvctl prints it.
type backupLine struct {
	ID    string       `json:"id"`
	Kind  string       `json:"kind"`
	Base  string       `json:"base"`
	Epoch client.Epoch `json:"epoch"`
	Parts int          `json:"parts"`
	Bytes int64        `json:"bytes"`
}

func (s *server) backUp(url string, args ...string) (b backupLine) {
	s.t.Helper()
	s.mustKvctl("checkpoint")
	s.mustJSON(&b, append([]string{"backup", "create", "--to", url, "-o", "jsonl"}, args...)...)
	return b
}

// timeOf is the time of the newest commit of a key.
func timeOf(t *testing.T, c *client.Client, key string) (at time.Time) {
	t.Helper()
	for v, err := range c.History(t.Context(), []byte(key), client.HistoryOptions{KeysOnly: true}) {
		if err != nil {
			t.Fatal(err)
		}
		if v.Time.After(at) {
			at = v.Time
		}
	}
	return at
}

// TestS3BackupsAndArchiveRestoreEveryState: with a prefix and over TLS, the states of backups and of the archive are what the
// client wrote, at the newest commit, at epochs and at times.
func TestS3BackupsAndArchiveRestoreEveryState(t *testing.T) {
	g := startGateway(t, true)
	const url = bucketURL + "/production/orders"
	s := g.server("--archive", url, "--archive-interval", "300ms", "--memtable-size", "4MiB", "--segment-size", "1MiB")
	p, c := newPast(t), s.dial(s.endpoint)
	p.write(c, 300, 200)
	early := p.last()
	p.fill(c, 90, 1<<20) // more than a part
	full := s.backUp(url)
	if full.Kind != "full" || full.Parts < 2 || full.Bytes < 90<<20 {
		t.Errorf("%+v", full)
	}
	p.write(c, 300, 200)
	between := p.last()
	marked, err := c.Put(t.Context(), []byte("marked"), []byte("1"), client.Sync())
	if err != nil {
		t.Fatal(err)
	}
	p.add(pastCommit{marked, map[string]string{"marked": "1"}})
	at := timeOf(t, c, "marked")
	time.Sleep(50 * time.Millisecond) // the time of the next commit is another one
	p.write(c, 300, 3000)
	incremental := s.backUp(url, "--base", "latest")
	if incremental.Kind != "incremental" || incremental.Base != full.ID || incremental.Bytes > full.Bytes/4 {
		t.Errorf("%+v after %+v", incremental, full)
	}
	p.write(c, 300, 200)
	s.awaitArchived(p.last())

	for _, id := range []string{full.ID, incremental.ID} {
		s.mustKvctl("backup", "verify", "--from", url, id)
		s.mustKvctl("backup", "show", "--from", url, id)
	}
	if list := s.mustKvctl("backup", "list", "--from", url); !strings.Contains(list, full.ID) || !strings.Contains(list, incremental.ID) {
		t.Errorf("listed %s", list)
	}
	p.wantRestored(s, url, early, "--to-epoch", fmt.Sprint(early))
	s.mustKvctl("backup", "prune", "--from", url, "--keep-full", "1", "--keep-days", "0") // and what the archive has of before the full backup
	s.mustKvctl("restore", "--from", url, "--latest", "--plan")
	scratch := t.TempDir()
	if drill := s.mustKvctl("backup", "drill", "--from", url, "--scratch", scratch, "-o", "table"); !strings.Contains(drill, "the drill was successful") || !strings.Contains(drill, incremental.ID) {
		t.Errorf("the drill says %s", drill)
	}
	if left, err := os.ReadDir(scratch); err != nil || len(left) > 0 {
		t.Errorf("the drill has left %v: %v", left, err)
	}

	p.wantRestored(s, url, p.last(), "--latest")
	p.wantRestored(s, url, marked, "--to-time", at.UTC().Format(time.RFC3339Nano))
	for _, e := range []client.Epoch{full.Epoch, between, incremental.Epoch} {
		p.wantRestored(s, url, e, "--to-epoch", fmt.Sprint(e))
	}
	if stray := len(g.objects("")) - len(g.objects("/production/orders/")); stray != 0 {
		t.Errorf("%d objects are not below the prefix", stray)
	}
}

// TestS3BackupGoesOnAfterAKill: a backup that kill -9 of the server ended leaves no backup, and the next one sends only what is missing.
func TestS3BackupGoesOnAfterAKill(t *testing.T) {
	g := startGateway(t, false)
	s := g.server("--memtable-size", "4MiB", "--segment-size", "1MiB")
	p, c := newPast(t), s.dial(s.endpoint)
	p.fill(c, 150, 1<<20)
	s.mustKvctl("checkpoint")
	ended := make(chan int, 1)
	go func() {
		_, _, code := s.kvctl("", "backup", "create", "--to", bucketURL, "--bandwidth", "40MiB")
		ended <- code
	}()
	for len(g.objects("/base/parts/")) == 0 {
		select {
		case code := <-ended:
			t.Fatalf("the backup ended with exit code %d before it had sent a part", code)
		case <-time.After(5 * time.Millisecond):
		}
	}
	s.signal(syscall.SIGKILL)
	if code := <-ended; code == 0 {
		t.Error("the backup of a killed server succeeded")
	}
	if n := len(g.objects("/base/manifests/")); n != 0 {
		t.Fatalf("%d backups are there", n)
	}
	sent := g.objects("/base/parts/")
	s.start()
	made := s.backUp(bucketURL)
	all := g.objects("/base/parts/")
	for name, when := range sent {
		if !all[name].Equal(when) {
			t.Errorf("%s was sent again", name)
		}
	}
	if len(sent) == made.Parts {
		t.Error("the killed backup had sent everything: the test proves nothing")
	}
	s.mustKvctl("backup", "verify", "--from", bucketURL)
	p.wantRestored(s, bucketURL, p.last(), "--to-epoch", fmt.Sprint(made.Epoch))
}

// TestS3ArchiveHasNoHoleAfterKills: kill -9 of the server while it archives loses no commit of the archive. After each kill the archiver waits
// half a minute, until it is sure that it is alone.
func TestS3ArchiveHasNoHoleAfterKills(t *testing.T) {
	t.Parallel()
	g := startGateway(t, false)
	s := g.server("--archive", bucketURL, "--archive-interval", "100ms", "--archive-file-size", "64KiB", "--memtable-size", "1MiB", "--segment-size", "256KiB")
	p := newPast(t)
	stop := p.writeUntil(s)
	var points []client.Epoch
	p.awaitCommits(1)
	for range 3 {
		s.awaitArchived(p.last()) // it is at work again
		p.awaitCommits(100)
		time.Sleep(time.Duration(p.count()%100) * time.Millisecond) // any moment of an upload
		points = append(points, p.last())
		s.signal(syscall.SIGKILL)
		s.start()
	}
	p.awaitCommits(100)
	stop()
	s.awaitArchived(p.last())
	p.compare("the original", s.dial(s.endpoint), p.last())
	p.wantRestored(s, bucketURL, p.last(), "--latest")
	for _, e := range points {
		p.wantRestored(s, bucketURL, e, "--to-epoch", fmt.Sprint(e))
	}
}

// TestS3StoreThatIsAwayForAWhileLosesNothing: commits go on while the store is away or hangs, and a running backup and the archiver go on
// when it is back.
func TestS3StoreThatIsAwayForAWhileLosesNothing(t *testing.T) {
	t.Parallel()
	g := startGateway(t, false)
	s := g.server("--archive", bucketURL, "--archive-interval", "100ms", "--archive-file-size", "64KiB", "--memtable-size", "4MiB", "--segment-size", "1MiB")
	p, c := newPast(t), s.dial(s.endpoint)
	p.fill(c, 90, 1<<20)
	s.mustKvctl("checkpoint")
	stop := p.writeUntil(s)
	p.awaitCommits(200)
	ended := make(chan string, 1)
	go func() {
		out, stderr, code := s.kvctl("", "backup", "create", "--to", bucketURL, "--bandwidth", "25MiB")
		ended <- fmt.Sprintf("exit %d: %s%s", code, out, stderr)
	}()

	// The first part is complete, and cannot be sent.
	awaitBackup(t, c, func(p *kvpb.BackupProgress) bool { return p.GetPages() > 0 })
	g.kill()
	awaitBackup(t, c, func(p *kvpb.BackupProgress) bool { return p.GetPages()*5 > p.GetPagesTotal()*4 })
	time.Sleep(500 * time.Millisecond)
	if n := len(g.objects("/base/parts/")); n != 0 {
		t.Fatalf("%d parts were sent to a store that was away", n)
	}
	p.awaitCommits(100) // they wait for no store
	g.start()
	s.awaitArchived(p.last())
	if result := <-ended; !strings.HasPrefix(result, "exit 0") {
		t.Errorf("the backup ended with %s", result)
	}

	// The store accepts connections and does not answer.
	g.signal(syscall.SIGSTOP)
	p.awaitCommits(500)
	time.Sleep(time.Second)
	g.signal(syscall.SIGCONT)
	s.awaitArchived(p.last())

	// The archiver has used up its attempts more than once.
	g.kill()
	for deadline := time.Now().Add(2 * startMax); !strings.Contains(s.archiveState().Error, "attempts failed"); time.Sleep(100 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the archive says %+v", s.archiveState())
		}
	}
	if health, _, _ := s.kvctl("", "health"); !strings.Contains(health, "archive-failing") {
		t.Errorf("health: %s", health)
	}
	p.awaitCommits(100)
	g.start()
	s.awaitArchived(p.last())

	p.awaitCommits(100)
	stop()
	s.awaitArchived(p.last())
	s.mustKvctl("backup", "verify", "--from", bucketURL)
	p.wantRestored(s, bucketURL, p.last(), "--latest")
}

// awaitBackup waits until the running backup is so far.
func awaitBackup(t *testing.T, c *client.Client, far func(*kvpb.BackupProgress) bool) {
	t.Helper()
	for deadline := time.Now().Add(startMax); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		status, err := c.BackupStatus(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if r := status.GetRunning(); r != nil && far(r.GetProgress()) {
			return
		}
	}
	t.Fatal("the backup does not get so far")
}

// TestS3RefusalsAreNamed: what is wrong with the credentials, the bucket or the certificate is said at once, and nothing is left.
func TestS3RefusalsAreNamed(t *testing.T) {
	g := startGateway(t, true)
	for _, c := range []struct {
		name, url string
		env       []string
		want      string // in the message
		exit      int    // of commands that read the store themselves
	}{
		{"wrong secret", bucketURL, []string{"AWS_SECRET_ACCESS_KEY=wrong"}, "access denied: SignatureDoesNotMatch", 9},
		{"unknown user", bucketURL, []string{"AWS_ACCESS_KEY_ID=unknown"}, "access denied: ", 9},
		{"no credentials", bucketURL, []string{"AWS_ACCESS_KEY_ID=", "AWS_SECRET_ACCESS_KEY="}, "access denied: AccessDenied", 9},
		{"no such bucket", "s3://missing/prefix", nil, "NoSuchBucket", 1},
		{"unknown authority", bucketURL, []string{"AWS_CA_BUNDLE="}, "certificate signed by unknown authority", 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := &server{t: t, dir: t.TempDir(), endpoint: freeAddress(t), env: g.environment(c.env...), args: []string{"--archive", c.url, "--archive-interval", "100ms"}}
			s.run()
			if _, stderr, code := s.kvctl("", "put", "k", "v"); code != 0 {
				t.Fatalf("a write needs the archive: exit %d: %s", code, stderr)
			}
			began := time.Now()
			out, stderr, code := s.kvctl("", "backup", "create", "--to", c.url, "-o", "json")
			if code != 4 || !strings.Contains(stderr, c.want) || !strings.Contains(stderr, `"reason":"BACKUP_FAILED"`) {
				t.Errorf("backup create: exit %d: %s%s", code, out, stderr)
			}
			restored := filepath.Join(s.dir, "restored")
			for _, args := range [][]string{{"backup", "list", "--from", c.url}, {"backup", "verify", "--from", c.url}, {"restore", "--from", c.url, "--latest", "--data-dir", restored}} {
				if out, stderr, code := s.kvctl("", args...); code != c.exit || !strings.Contains(stderr, c.want) {
					t.Errorf("%s: exit %d: %s%s", args, code, out, stderr)
				}
			}
			if left, _ := filepath.Glob(restored + "*"); left != nil {
				t.Errorf("left %v", left)
			}
			if took := time.Since(began); took > startMax {
				t.Errorf("the refusals took %v: they were repeated", took)
			}
			for deadline := time.Now().Add(startMax); !strings.Contains(s.archiveState().Error, c.want); time.Sleep(20 * time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatalf("the archive says %+v", s.archiveState())
				}
			}
		})
	}
	if left := g.objects(""); len(left) != 0 {
		t.Errorf("left %v", left)
	}
	if _, err := os.Stat(filepath.Join(g.root, "missing")); err == nil {
		t.Error("a bucket was made")
	}
}

// TestS3BulkLoadSurvivesAKillOnItsWayToTheArchive: a bulk load of several objects, after which the server is killed at once, does not end the
// chain of the archive: it goes on after the next start, and states before the load, at its epoch and after it are restored from the archive alone.
func TestS3BulkLoadSurvivesAKillOnItsWayToTheArchive(t *testing.T) {
	t.Parallel()
	g := startGateway(t, false)
	const url = bucketURL + "/loaded"
	s := g.server("--archive", url, "--archive-interval", "300ms", "--archive-file-size", "1MiB")
	p, c := newPast(t), s.dial(s.endpoint)
	p.write(c, 50, 200)
	before := p.last()
	load, err := c.BulkLoad(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	loaded := map[string]string{}
	for i := range 8_000 {
		key, value := fmt.Sprintf("loaded/%05d", i), p.value(i, 500)
		loaded[key] = value
		if err := load.Put([]byte(key), []byte(value)); err != nil {
			t.Fatal(err)
		}
	}
	done, err := load.Commit()
	if err != nil {
		t.Fatal(err)
	}
	p.add(pastCommit{done.Epoch, loaded})
	s.signal(syscall.SIGKILL)
	s.start()
	c = s.dial(s.endpoint)
	p.write(c, 50, 200)
	s.awaitArchived(p.last())
	for _, e := range []client.Epoch{before, done.Epoch, p.last()} {
		p.wantRestored(s, url, e, "--to-epoch", fmt.Sprint(e))
	}
}
