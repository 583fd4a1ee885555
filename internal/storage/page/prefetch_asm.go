//go:build amd64 || arm64

package page

// prefetch starts loading the first four cache lines at p.
//
//go:noescape
func prefetch(p *byte)
