package server

import (
	"errors"
	"io/fs"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/vfs"
)

func TestRiskyConfigurationsCauseWarnings(t *testing.T) {
	for name, test := range map[string]struct {
		adjust func(*config.Config)
		on     machine
		want   string // empty: no warning
	}{
		"default":               {func(*config.Config) {}, machine{memory: 4 << 30}, ""},
		"just fits":             {func(c *config.Config) { c.Memory = config.GiB }, machine{memory: 5<<28 + 64<<20}, ""},
		"feed memory":           {func(c *config.Config) { c.Memory = config.GiB }, machine{memory: 5<<28 + 64<<20 - 1}, "--feed-memory"},
		"memory":                {func(c *config.Config) { c.Memory = config.GiB }, machine{memory: 5<<28 - 1}, "--memory"},
		"unknown memory":        {func(c *config.Config) { c.Memory = 8 * config.TiB }, machine{}, ""},
		"any address":           {func(c *config.Config) { c.Listen = "0.0.0.0:7400" }, machine{}, "--listen 0.0.0.0:7400, and it has neither"},
		"any address, v6":       {func(c *config.Config) { c.Listen = "[::]:7400" }, machine{}, "--listen"},
		"no host":               {func(c *config.Config) { c.HTTP = ":7401" }, machine{}, "--http :7401"},
		"another loopback":      {func(c *config.Config) { c.Listen = "127.0.0.2:7400" }, machine{}, ""},
		"loopback v6":           {func(c *config.Config) { c.Listen = "[::1]:7400" }, machine{}, ""},
		"localhost":             {func(c *config.Config) { c.Listen = "localhost:7400" }, machine{}, ""},
		"a name":                {func(c *config.Config) { c.Listen = "db1:7400" }, machine{}, "--listen db1"},
		"no http":               {func(c *config.Config) { c.HTTP = "" }, machine{}, ""},
		"file system in memory": {func(*config.Config) {}, machine{fileSystem: weakFileSystemType(unix.TMPFS_MAGIC)}, "in memory"},
		"nfs":                   {func(*config.Config) {}, machine{fileSystem: weakFileSystemType(unix.NFS_SUPER_MAGIC)}, "NFS"},
		"ext4":                  {func(*config.Config) {}, machine{fileSystem: weakFileSystemType(unix.EXT4_SUPER_MAGIC)}, ""},
	} {
		c := config.Default()
		test.adjust(&c)
		got := strings.Join(startWarnings(&c, test.on, false), "\n")
		if test.want == "" && got != "" || !strings.Contains(got, test.want) {
			t.Errorf("%s: %q", name, got)
		}
	}
}

// TestUsersProtectEncryptedListeners, and no others: a start that nothing else protects needs users that are checked, or --insecure.
func TestUsersProtectEncryptedListeners(t *testing.T) {
	c := config.Default()
	c.Listen = "0.0.0.0:7400"
	if got := startWarnings(&c, machine{}, true); len(got) != 1 {
		t.Errorf("in plain text, with users: %q", got)
	}
	c.TLS.Cert, c.TLS.Key = "c", "k"
	for checks, want := range map[bool]int{false: 1, true: 0} {
		if got := startWarnings(&c, machine{}, checks); len(got) != want {
			t.Errorf("encrypted, users are checked %v: %q", checks, got)
		}
	}
}

func TestMemoryLimitIsTheSmallestAboveTheProcess(t *testing.T) {
	files := map[string]string{
		"/proc/self/cgroup": "12:memory,x:/a/b\n1:name=systemd:/\n0::/c\n",
		"/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "9223372036854771712\n",
		"/sys/fs/cgroup/memory/a/memory.limit_in_bytes":   "4096\n",
		"/sys/fs/cgroup/c/memory.max":                     "max\n",
		"/sys/fs/cgroup/memory.max":                       "8192\n",
	}
	read := func(name string) ([]byte, error) {
		if text, ok := files[name]; ok {
			return []byte(text), nil
		}
		return nil, fs.ErrNotExist
	}
	if got := memoryLimit(read); got != 4096 {
		t.Errorf("version 1: %d", got)
	}
	delete(files, "/sys/fs/cgroup/memory/a/memory.limit_in_bytes")
	if got := memoryLimit(read); got != 8192 {
		t.Errorf("version 2: %d", got)
	}
	clear(files)
	if got := memoryLimit(read); got < 1<<20 || got == math.MaxInt64 {
		t.Errorf("no groups: %d", got)
	}
}

// TestBoundAddressesDecideWhatIsExposed: localhost is what the machine's resolver says. If a listener has got
// an address that other machines can reach, the server does not start, whatever name its option has.
func TestBoundAddressesDecideWhatIsExposed(t *testing.T) {
	for option, spoil := range map[string]func(*config.Config){
		"--listen": func(c *config.Config) { c.Listen = "0.0.0.0:0" },
		"--http":   func(c *config.Config) { c.HTTP = "[::]:0" },
	} {
		c := testConfig()
		spoil(&c) // Validate, which looks at names, has not been called
		_, err := open(t.Context(), c, slog.New(slog.DiscardHandler), vfs.NewMem())
		if !errors.Is(err, ErrConfiguration) || !strings.Contains(err.Error(), option) || !strings.Contains(err.Error(), "--insecure") {
			t.Errorf("%s: %v", option, err)
		}
		c.TLS.Insecure = true
		s := &Server{configuration: configuration{config: c}}
		if err := s.listen(); err != nil {
			t.Errorf("%s with --insecure: %v", option, err)
		} else if err := s.closeListeners(); err != nil {
			t.Error(err)
		}
	}
}

func TestConnectionsThatTheProcessCannotCarryAreRefused(t *testing.T) {
	for _, test := range []struct {
		connections int
		cert        string // not empty: handshakes have descriptors beside the connections
		http        string // the same: so have connections of HTTP
		limit       uint64
		ok          bool
	}{
		{1024, "", "", 1344, true},
		{1024, "", "", 1343, false},
		{1, "", "", 100, false},
		{1 << 24, "", "", 1 << 20, false},
		{1024, "c", "", 1344 + 256 + 32, true},
		{1024, "c", "", 1344 + 256 + 31, false},
		{1024, "", ":1", 1344 + 64, true},
		{1024, "", ":1", 1344 + 63, false},
	} {
		c := config.Config{TLS: config.TLS{Cert: test.cert}, HTTP: test.http}
		c.Limits.Connections = test.connections
		err := checkFileLimit(&c, test.limit)
		if (err == nil) != test.ok || err != nil && (!errors.Is(err, ErrConfiguration) || !strings.Contains(err.Error(), "--max-connections")) {
			t.Errorf("%d connections of %d files: %v", test.connections, test.limit, err)
		}
	}
	c := testConfig()
	c.Limits.Connections = 1 << 24
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if limit.Max < 1<<24 {
		if _, err := open(t.Context(), c, slog.New(slog.DiscardHandler), nil); !errors.Is(err, ErrConfiguration) {
			t.Errorf("open: %v", err)
		}
	}
	if got, err := raiseFileLimit(); err != nil || got != limit.Max {
		t.Errorf("raised to %d of %d, %v", got, limit.Max, err)
	}
}

// TestReserveThatFillsTheDiskIsRefused: the server would take all of the file system.
func TestReserveThatFillsTheDiskIsRefused(t *testing.T) {
	for _, test := range []struct {
		reserve config.Size
		disk    int64
		ok      bool
	}{{0, 1 << 30, true}, {config.GiB / 2, 1 << 30, true}, {config.GiB/2 + 1, 1 << 30, false}, {config.TiB, 0, true}} {
		if err := checkReserve(test.reserve, test.disk); (err == nil) != test.ok || err != nil && !errors.Is(err, ErrConfiguration) {
			t.Errorf("%v of %d: %v", test.reserve, test.disk, err)
		}
	}
	disk := thisMachine(filepath.Join(t.TempDir(), "not yet", "there")).disk
	if disk <= 0 {
		t.Fatalf("the file system of a temporary directory has %d bytes", disk)
	}
	c := testConfig()
	c.DiskReserve = config.Size(disk/2 + 1)
	c.DataDir = filepath.Join(t.TempDir(), "data")
	if _, err := open(t.Context(), c, slog.New(slog.DiscardHandler), vfs.NewMem()); !errors.Is(err, ErrConfiguration) {
		t.Errorf("open: %v", err)
	}
}

func TestWidePermissionsAreFound(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "data.ekv")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if wide := widePermissions(dir); len(wide) != 0 {
		t.Errorf("private: %v", wide)
	}
	if err := os.Chmod(file, 0o640); err != nil {
		t.Fatal(err)
	}
	if wide := widePermissions(dir); len(wide) != 1 || !strings.HasPrefix(wide[0], file) {
		t.Errorf("%v", wide)
	}
	if wide := widePermissions(filepath.Join(dir, "missing")); len(wide) != 0 {
		t.Errorf("missing: %v", wide)
	}
}
