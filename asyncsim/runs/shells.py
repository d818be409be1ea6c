"""Start-up code for shells: a function that changes to a tagged folder, and completion of tags."""

_BASH = r"""warp() {
    local place
    place="$(asyncsim warp "$@")" && cd -- "$place"
}
_asyncsim_tags() {
    COMPREPLY=($(compgen -W "$(asyncsim runs --names 2>/dev/null)" -- "${COMP_WORDS[COMP_CWORD]}"))
}
_asyncsim() {
    case " COMMANDS " in
        *" ${COMP_WORDS[1]} "*) ((COMP_CWORD > 1)) && _asyncsim_tags ;;
    esac
}
complete -F _asyncsim_tags warp
complete -o default -F _asyncsim asyncsim
"""

_ZSH = r"""warp() {
    local place
    place="$(asyncsim warp "$@")" && cd -- "$place"
}
_asyncsim_tags() {
    compadd -- ${(f)"$(asyncsim runs --names 2>/dev/null)"}
}
_asyncsim() {
    if (( CURRENT > 2 )) && [[ " COMMANDS " == *" ${words[2]} "* ]]; then
        _asyncsim_tags
    else
        _files
    fi
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
compdef _asyncsim_tags warp
compdef _asyncsim asyncsim
"""

_FISH = r"""function warp
    set -l place (asyncsim warp $argv)
    and cd -- $place
end
complete -c warp -f -a "(asyncsim runs --names 2>/dev/null)"
complete -c asyncsim -n "__fish_seen_subcommand_from COMMANDS" -f \\
    -a "(asyncsim runs --names 2>/dev/null)"
"""

#: The code by shell; COMMANDS stands for the commands whose arguments may be tags.
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
