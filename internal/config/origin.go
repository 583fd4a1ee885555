package config

// Where the value of an option comes from. That of a file is followed by its name and the line.
const (
	OriginDefault     = "default"
	OriginFlag        = "flag"
	OriginEnvironment = "environment"
	OriginFile        = "file"
)

// origins are those of options that were given, by name: of several sources the last one that Load read.
type origins map[string]string

// Option is an option with its value, as text, and where the value comes from.
type Option struct{ Name, Value, Origin string }

// Options are all options, in the order of --help.
func (c Config) Options() []Option {
	o := newOptions()
	o.config = c
	var all []Option
	for _, name := range o.names() {
		option := Option{Name: name, Value: o.flags.Lookup(name).Value.String(), Origin: OriginDefault}
		if c.origins != nil && (*c.origins)[name] != "" {
			option.Origin = (*c.origins)[name]
		}
		all = append(all, option)
	}
	return all
}
