package server

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/epochkv/epochkv/internal/config"
)

// ErrConfiguration marks errors of a configuration that does not fit this machine. A restart does
// not help.
var ErrConfiguration = errors.New("server: the configuration does not fit this machine")

// machine has the facts about the machine that the start checks use. A zero means unknown.
type machine struct {
	memory     int64  // the smaller of physical memory and the limit of the control group
	fileSystem string // of the data directory, if it is one of those that do not keep data or promises
	disk       int64  // size of that file system
}

// startWarnings are warnings about a configuration that works but has a risk.
func startWarnings(c *config.Config, m machine, checksUsers bool) (warnings []string) {
	warn := func(format string, args ...any) { warnings = append(warnings, fmt.Sprintf(format, args...)) }
	// The heap may take a quarter of the budget beside it: see tuneRuntime.
	if need := int64(c.Memory) + int64(c.Memory)/4; m.memory > 0 && need > m.memory {
		warn("--memory %v and a quarter of it for requests are more than the %d MiB of this machine or its control group; the kernel may kill the server: lower --memory to %d MiB",
			c.Memory, m.memory>>20, m.memory/5*4>>20)
	} else if m.memory > 0 && need+int64(c.Feed.Memory) > m.memory {
		warn("--memory %v with a quarter of it for requests, and --feed-memory %v for watches, are more than the %d MiB of this machine or its control group; the kernel may kill the server: lower one of them",
			c.Memory, c.Feed.Memory, m.memory>>20)
	}
	for _, exposed := range c.Exposed() {
		if exposed.UsersSuffice && checksUsers {
			continue
		}
		warn("--insecure: other machines can reach --%s %s, and %s", exposed.Option, exposed.Address, exposed.Missing)
	}
	if m.fileSystem != "" {
		warn("--data-dir %s is on %s", c.DataDir, m.fileSystem)
	}
	return warnings
}

// thisMachine looks at the machine. The data directory need not exist yet.
func thisMachine(dataDir string) machine {
	m := machine{memory: memoryLimit(os.ReadFile)}
	if st, ok := fileSystemOf(dataDir); ok {
		m.fileSystem, m.disk = weakFileSystemType(st.Type), int64(min(st.Blocks, math.MaxInt64/uint64(max(st.Bsize, 1))))*st.Bsize
	}
	return m
}

// memoryLimit is the smallest of physical memory and the limits of the control groups above this
// process.
func memoryLimit(read func(string) ([]byte, error)) int64 {
	var info unix.Sysinfo_t
	limit := int64(math.MaxInt64)
	if unix.Sysinfo(&info) == nil {
		limit = min(limit, int64(info.Totalram*uint64(info.Unit)))
	}
	for _, name := range controlGroupLimits(read) {
		text, err := read(name)
		if err != nil {
			continue
		}
		// "max" means no limit, and in version 1 so does a number near the largest.
		if n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil && n > 0 {
			limit = min(limit, n)
		}
	}
	if limit == math.MaxInt64 {
		return 0
	}
	return limit
}

// controlGroupLimits are the files that may hold a memory limit of this process, in both versions
// of control groups.
func controlGroupLimits(read func(string) ([]byte, error)) (names []string) {
	text, err := read("/proc/self/cgroup")
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(text)) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(fields) != 3 {
			continue
		}
		var root, file string
		switch {
		case fields[0] == "0":
			root, file = "/sys/fs/cgroup", "memory.max"
		case strings.Contains(fields[1], "memory"):
			root, file = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
		default:
			continue
		}
		for group := filepath.Join("/", fields[2]); ; group = filepath.Dir(group) {
			names = append(names, filepath.Join(root, group, file))
			if group == "/" {
				break
			}
		}
	}
	return names
}

// fileSystemOf describes the file system of the nearest directory that exists.
func fileSystemOf(dir string) (st unix.Statfs_t, ok bool) {
	for dir = filepath.Clean(dir); ; dir = filepath.Dir(dir) {
		err := unix.Statfs(dir, &st)
		if err == nil {
			return st, true
		}
		if !errors.Is(err, fs.ErrNotExist) || dir == filepath.Dir(dir) {
			return st, false
		}
	}
}

// checkReserve refuses a reserve of more than half of the file system: such a server would reserve
// all space that is free, and then refuse writes until there is more.
func checkReserve(reserve config.Size, disk int64) error {
	if disk == 0 || int64(reserve) <= disk/2 {
		return nil
	}
	return fmt.Errorf("%w: --disk-reserve %v is more than half of the %d MiB of the file system of --data-dir; lower it",
		ErrConfiguration, reserve, disk>>20)
}

func weakFileSystemType(magic int64) string {
	const network = ", a network or user-space file system; whether fdatasync and locks keep their promises is up to it"
	switch magic {
	case unix.TMPFS_MAGIC, unix.RAMFS_MAGIC:
		return "a file system in memory: a restart of the machine loses everything"
	case unix.OVERLAYFS_SUPER_MAGIC:
		return "an overlay file system, as containers have: removing the container loses everything; mount a volume"
	case unix.NFS_SUPER_MAGIC:
		return "NFS" + network
	case unix.SMB_SUPER_MAGIC, unix.SMB2_SUPER_MAGIC, unix.CIFS_SUPER_MAGIC:
		return "SMB" + network
	case unix.FUSE_SUPER_MAGIC:
		return "FUSE" + network
	case unix.V9FS_MAGIC:
		return "9P" + network
	case unix.CEPH_SUPER_MAGIC:
		return "CephFS" + network
	}
	return ""
}

// widePermissions lists the data directory and what is in it with permissions for others than the
// owner.
func widePermissions(dir string) (wide []string) {
	_ = filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err // ends the walk; the store reports the error
		}
		if info, err := d.Info(); err == nil && info.Mode().Perm()&0o077 != 0 {
			wide = append(wide, fmt.Sprintf("%s %v", name, info.Mode().Perm()))
		}
		return nil
	})
	return wide
}

// warnAtStart logs the start warnings.
func (s *Server) warnAtStart() {
	c, log := &s.config, s.log.Logger
	for _, warning := range startWarnings(c, thisMachine(c.DataDir), s.gate.users.Table().Enabled) {
		log.Warn(warning)
	}
	if wide := widePermissions(c.DataDir); len(wide) > 0 {
		log.Warn("other accounts of this machine may reach the data; chmod -R go= "+c.DataDir+" takes that away", "first", wide[0], "files", len(wide))
	}
}

// filesReserved is the number of files that the process opens besides connections: the store's
// files, log segments, bulk loads, the listeners and rings.
const filesReserved = 256

// raiseFileLimit raises the soft limit of open files to the hard one, and returns it.
func raiseFileLimit() (uint64, error) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 0, fmt.Errorf("getrlimit: %w", err)
	}
	if limit.Cur < limit.Max {
		limit.Cur = limit.Max
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
			return 0, fmt.Errorf("setrlimit: %w", err)
		}
	}
	return limit.Cur, nil
}

// checkFileLimit refuses a number of connections that the process cannot hold open beside its
// files and its TLS handshakes.
func checkFileLimit(c *config.Config, limit uint64) error {
	beside := uint64(refusedConnectionsMax + filesReserved)
	if c.HTTP != "" {
		beside += httpConnectionsMax
	}
	if c.TLS.Enabled() {
		beside += config.HandshakesMax + config.HandshakesHTTPMax
	}
	need := uint64(c.Limits.Connections) + beside
	if need <= limit {
		return nil
	}
	return fmt.Errorf("%w: --max-connections %d needs %d open files, and this process may open %d; lower --max-connections to %d or raise the limit (ulimit -n, LimitNOFILE= of systemd)",
		ErrConfiguration, c.Limits.Connections, need, limit, max(int64(limit)-int64(beside), 0))
}

// boundConfig is the configuration with the addresses that localhost and others have turned out to be. Validate has looked at the
// names of the options.
func (s *Server) boundConfig() *config.Config {
	bound := s.config
	bound.Listen = s.Address()
	if bound.HTTP != "" {
		bound.HTTP = s.HTTPAddress()
	}
	return &bound
}

// checkBound refuses listeners that other machines can reach in plain text, without --insecure.
func (s *Server) checkBound() error {
	bound := s.boundConfig()
	for _, exposed := range bound.Exposed() {
		if !exposed.UsersSuffice && !bound.TLS.Insecure {
			return fmt.Errorf("%w: --%s: %s: other machines can reach this listener, and %s; listen on 127.0.0.1, require client certificates, or accept the risk with --insecure",
				ErrConfiguration, exposed.Option, exposed.Address, exposed.Missing)
		}
	}
	return nil
}

// checkUsers refuses listeners that other machines can reach if only users would protect them, and users are not checked.
func (s *Server) checkUsers() error {
	exposed := s.exposedToAll()
	if exposed == nil || s.gate.users.Table().Enabled {
		return nil
	}
	return fmt.Errorf("%w: --%s: %s: other machines can reach this listener, and %s; require client certificates (--tls-client-auth), listen on 127.0.0.1 until users are checked "+
		"(kvctl user bootstrap, kvctl auth enable), or accept the risk with --insecure", ErrConfiguration, exposed.Option, exposed.Address, exposed.Missing)
}

// exposedToAll is a listener that nothing but users protects; nil if there is none, or --insecure accepts that.
func (s *Server) exposedToAll() *config.Exposed {
	bound := s.boundConfig()
	for _, exposed := range bound.Exposed() {
		if exposed.UsersSuffice && !bound.TLS.Insecure {
			return &exposed
		}
	}
	return nil
}
